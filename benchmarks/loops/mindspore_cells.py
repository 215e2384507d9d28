"""A train step for GRAPH mode, which reads its source from a file."""

from mindspore import nn, ops


class StepWithNorm(nn.TrainOneStepCell):
    """Return the loss and the norm of all gradients, like a hand-written train step."""

    def construct(self, *inputs):
        loss = self.network(*inputs)
        gradients = self.grad_no_sens(self.network, self.weights)(*inputs)
        total = 0.0
        for gradient in gradients:
            total = total + ops.reduce_sum(ops.square(gradient))
        loss = ops.depend(loss, self.optimizer(gradients))
        return loss, ops.sqrt(total)
