"""A backend of a third framework, linear models of numpy arrays, as it is written outside of dualtrain."""

import numpy as np

from dualtrain.engine import RunEngine
from dualtrain.loop import is_due, run_evaluation, run_training
from dualtrain.protocol import Capability


class Linear:
    def __init__(self, weights):
        self.weights = np.array(weights, np.float64)

    def __call__(self, x):
        return x @ self.weights


class SquaredError:
    def __call__(self, outputs, labels):
        return np.mean((outputs - labels) ** 2)

    def gradient(self, x, outputs, labels):
        return 2 * x.T @ (outputs - labels) / len(labels)


class Descent:
    def __init__(self, network, rate):
        self.network, self.rate = network, rate

    def step(self, gradient):
        self.network.weights -= self.rate * gradient


class DescentRate:
    def __init__(self, optimizer):
        self._optimizer = optimizer

    def read(self):
        return float(self._optimizer.rate)

    def write(self, rate):
        self._optimizer.rate = float(rate)

    def scale(self, factor, min_lr=0.0):
        self.write(max(self.read() * factor, min(min_lr, self.read())))
        return self.read()


class DescentStep:
    """Train on one batch, each of which makes an update. It is its own part for gradients."""

    capabilities = frozenset({Capability.GRAD_NORM, Capability.PARAMETER_GRAD_NORMS})
    is_update_step, step_skipped, loss_scale = True, False, None

    def __init__(self, network, loss_fn, optimizer):
        self._network, self._loss_fn, self._optimizer = network, loss_fn, optimizer
        self.learning_rate, self.global_step = DescentRate(optimizer), 0
        self.gradients = self.parameter_norms = self

    def __call__(self, batch):
        x, labels = batch
        outputs = self._network(x)
        self._gradient = self._loss_fn.gradient(x, outputs, labels)
        self._optimizer.step(self._gradient)
        self.global_step += 1
        return self._loss_fn(outputs, labels)

    def grad_norm(self):
        return float(np.linalg.norm(self._gradient))

    grad_norm_clipped = grad_norm

    def trained_parameters(self):
        return {"weights": self._network.weights}

    def request_parameter_grad_norms(self):
        """They are always known."""

    def parameter_grad_norms(self):
        return {"weights": self.grad_norm()}


class ArrayModel:
    def __init__(self, network, loss_fn, optimizer):
        self._network, self._loss_fn, self._optimizer = network, loss_fn, optimizer

    def train(self, epoch, train_dataset, callbacks=None, **initial):
        self.fit(epoch, train_dataset, callbacks=callbacks, **initial)

    def fit(self, epoch, data, valid_data=None, valid_frequency=1, callbacks=None, initial_epoch=0):
        evaluate = None if valid_data is None else lambda: self._evaluate(engine, valid_data)
        due = sum(is_due(number, valid_frequency) for number in range(initial_epoch + 1, epoch + 1))
        run = {"initial_epoch": initial_epoch, "epochs": epoch, "evaluations": due if evaluate else 0}
        step = DescentStep(self._network, self._loss_fn, self._optimizer)
        when = {"epoch": epoch, "initial_epoch": initial_epoch, "valid_frequency": valid_frequency}
        with self._engine(callbacks, step=step, batch_num=len(data), **run) as engine:
            run_training(engine, step, data, evaluate=evaluate, **when)

    def eval(self, valid_data, callbacks=None):
        with self._engine(callbacks) as engine:
            self._evaluate(engine, valid_data)
        return dict(engine.context.metrics)

    def predict(self, x):
        return self._network(x)

    def _engine(self, callbacks, batch_num=None, **run):
        params = {"network": self._network, "optimizer": self._optimizer, "batch_num": batch_num}
        return RunEngine(callbacks, params=params, backend=BACKEND, **run)

    def _evaluate(self, engine, batches):
        losses = []
        loss_of = lambda batch: self._loss_fn(self._network(batch[0]), batch[1])  # noqa: E731
        parts = {"update": losses.append, "results": lambda: {"eval_loss": float(np.mean(losses))}}
        run_evaluation(engine, loss_of, batches, batch_num=len(batches), **parts)


class ArrayBackend:
    name = "arrays"

    def __str__(self):
        return self.name

    def owns(self, obj):
        return isinstance(obj, (Linear, Descent))

    def model_class(self):
        return ArrayModel

    def capabilities(self):
        return DescentStep.capabilities | {Capability.STEP_EVENTS}

    def describe_mode(self):
        return "arrays"

    def version(self):
        return "1.0"

    def to_float(self, value):
        return float(np.mean(value))

    def to_numpy(self, value):
        return np.asarray(value)

    def learning_rate(self, optimizer):
        return DescentRate(optimizer)


BACKEND = ArrayBackend()
