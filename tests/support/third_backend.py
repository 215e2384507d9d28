"""A backend of a third framework, as its author would write it outside of dualtrain.

The framework is this file's upper half: linear models of numpy arrays. The backend is its lower half:
the verbs, and a Model that drives dualtrain's own loop.
"""

import numpy as np
from contexts import context_of

from dualtrain.bus import EventBus
from dualtrain.context import CallbackParams
from dualtrain.loop import run_evaluation, run_training
from dualtrain.protocol import BatchShape, Capability

# The framework.


class Linear:
    """``x @ weights``."""

    def __init__(self, weights):
        self.weights = np.array(weights, np.float64)

    def __call__(self, x):
        return x @ self.weights


class SquaredError:
    """The mean squared error of a linear model, and its gradient."""

    def __call__(self, outputs, labels):
        return np.mean((outputs - labels) ** 2)

    def gradient(self, x, outputs, labels):
        return 2 * x.T @ (outputs - labels) / len(labels)


class Descent:
    """Gradient descent."""

    def __init__(self, network, rate):
        self.network = network
        self.rate = rate

    def step(self, gradient):
        self.network.weights -= self.rate * gradient


# The backend.


class DescentRate:
    """The learning rate of a Descent."""

    def __init__(self, optimizer):
        self._optimizer = optimizer

    def read(self):
        return float(self._optimizer.rate)

    def write(self, rate):
        self._optimizer.rate = float(rate)

    def scale(self, factor, min_lr=0.0):
        rate = self.read()
        self.write(max(rate * factor, min(min_lr, rate)))
        return self.read()


class DescentStep:
    """Train on one batch, each of which makes an update."""

    accumulate_steps = 1
    is_update_step = True
    step_skipped = False
    loss_scale = None

    def __init__(self, network, loss_fn, optimizer):
        self._network, self._loss_fn, self._optimizer = network, loss_fn, optimizer
        self.learning_rate = DescentRate(optimizer)
        self.global_step = 0

    def __call__(self, batch):
        x, labels = batch
        outputs = self._network(x)
        self._gradient = self._loss_fn.gradient(x, outputs, labels)
        self._optimizer.step(self._gradient)
        self.global_step += 1
        return self._loss_fn(outputs, labels)

    def grad_norm(self):
        return None

    def grad_norm_clipped(self):
        return None

    def trained_parameters(self):
        return {"weights": self._network.weights}

    def request_parameter_grad_norms(self):
        pass

    def parameter_grad_norms(self):
        return {"weights": float(np.linalg.norm(self._gradient))}

    def attention(self, samples, function):
        return []

    def explain_nonfinite(self, batch):
        return ""


class ArrayModel:
    """The Model of linear models."""

    def __init__(self, network, loss_fn, optimizer):
        self._network, self._loss_fn, self._optimizer = network, loss_fn, optimizer

    def train(self, epoch, train_dataset, callbacks=None, *, initial_epoch=0):
        self.fit(epoch, train_dataset, callbacks=callbacks, initial_epoch=initial_epoch)

    def fit(
        self,
        epoch,
        train_dataset,
        valid_dataset=None,
        valid_frequency=1,
        callbacks=None,
        *,
        initial_epoch=0,
    ):
        step = DescentStep(self._network, self._loss_fn, self._optimizer)
        params = CallbackParams(
            mode="train",
            cur_step_num=0,
            epoch_num=epoch - initial_epoch,
            batch_num=len(train_dataset),
            network=self._network,
            optimizer=self._optimizer,
        )
        context, bus = self._start(params, callbacks, step)

        def evaluate():
            training = {key: params[key] for key in ("cur_step_num", "batch_num", "net_outputs")}
            params.update(mode="eval", cur_step_num=0, batch_num=len(valid_dataset))
            self._evaluate(context, bus, valid_dataset)
            params.update(training, mode="train")

        with bus.lifecycle(context):
            run_training(
                context,
                bus,
                step,
                train_dataset,
                epoch=epoch,
                initial_epoch=initial_epoch,
                evaluate=None if valid_dataset is None else evaluate,
                valid_frequency=valid_frequency,
            )

    def eval(self, valid_dataset, callbacks=None):
        params = CallbackParams(
            mode="eval", cur_step_num=0, batch_num=len(valid_dataset), network=self._network
        )
        context, bus = self._start(params, callbacks, None)
        with bus.lifecycle(context):
            self._evaluate(context, bus, valid_dataset)
        return dict(params["metrics"])

    def predict(self, x):
        return self._network(x)

    def _start(self, params, callbacks, step):
        bus = EventBus(callbacks)
        bus.check_needs(BACKEND.capabilities(), BACKEND.describe_mode())
        return context_of(params, backend=BACKEND, step=step), bus

    def _evaluate(self, context, bus, batches):
        losses = []

        def step(batch):
            x, labels = batch
            return self._loss_fn(self._network(x), labels)

        def finish():
            results = {"eval_loss": float(np.mean(losses))}
            context.original_args().update(metrics=results, eval_results=results)

        run_evaluation(context, bus, step, batches, losses.append, finish)


class ArrayBackend:
    """Linear models of numpy arrays."""

    name = "arrays"

    def __str__(self):
        return self.name

    def owns(self, obj):
        return isinstance(obj, (Linear, Descent))

    def model_class(self):
        return ArrayModel

    def capabilities(self):
        return frozenset(
            {Capability.STEP_EVENTS, Capability.PARAMETER_GRAD_NORMS, Capability.CALLBACK_TIMES}
        )

    def describe_mode(self):
        return "arrays"

    def version(self):
        return "1.0"

    def to_float(self, value):
        return float(np.mean(value))

    def to_numpy(self, value):
        return np.asarray(value)

    def batch_shape(self, batch):
        return BatchShape(batch[0].shape, batch[0].dtype.kind in "iu")

    def learning_rate(self, optimizer):
        return DescentRate(optimizer)

    def weights(self, network):
        return {"weights": network.weights.copy()}

    def assign_weights(self, network, weights):
        network.weights[:] = weights["weights"]

    def copy_parameters(self, parameters):
        return {name: values.copy() for name, values in parameters.items()}

    def parameter_changes(self, before, now):
        return {
            name: (float(np.linalg.norm(old)), float(np.linalg.norm(now[name] - old)))
            for name, old in before.items()
        }

    def rank(self):
        return 0

    def world_size(self):
        return 1

    def any_rank(self, flag):
        return flag


BACKEND = ArrayBackend()
