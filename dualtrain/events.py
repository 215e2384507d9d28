"""The lifecycle events, their aliases, and their order.

Training with ``fit`` (``train`` is the same without the evaluation)::

    on_train_begin
      on_train_epoch_begin
        on_train_step_begin
           [forward, backward]
           on_after_backward                                 gradients of this batch, raw
           on_gradients_ready                                once per update: unscaled, not yet clipped
           on_before_optimizer_step                          once per update: clipped
           [update]
           on_after_optimizer_step                           once per update: step_skipped is known
        on_train_step_end                                    once per batch
        (evaluation, if due in this epoch)
        on_eval_begin
          on_eval_epoch_begin
            on_eval_step_begin
               [forward]
            on_eval_step_end                                 once per batch
          on_eval_epoch_end
        on_eval_end                                          metrics are available
      on_train_epoch_end                                     metrics are still available
    on_train_end

The four gradient events exist on PyTorch and in MindSpore's PYNATIVE mode; in GRAPH mode no Python
runs inside a step, and a callback with one of them is refused.

``eval`` alone fires the six ``on_eval_*`` events. The final events depend on the end of the run:

=================================  ==================================================
the run ends by                    final events
=================================  ==================================================
its last epoch                     on_train_end, on_teardown
``request_stop`` at a step         (evaluation), on_train_epoch_end, on_train_end,
                                   on_teardown
``request_stop`` in an evaluation  on_eval_epoch_end, on_eval_end, on_train_epoch_end,
                                   on_train_end, on_teardown
an error, Ctrl-C, a SIGTERM        on_exception, on_teardown; no on_train_end
=================================  ==================================================
"""

from __future__ import annotations

from enum import Enum


class Event(str, Enum):
    """An event of a run; its value is the name of the callback method.

    The first twelve are MindSpore's, in MindSpore's order. The others are specific to dualtrain.
    """

    TRAIN_BEGIN = "on_train_begin"
    TRAIN_EPOCH_BEGIN = "on_train_epoch_begin"
    TRAIN_STEP_BEGIN = "on_train_step_begin"
    TRAIN_STEP_END = "on_train_step_end"
    TRAIN_EPOCH_END = "on_train_epoch_end"
    TRAIN_END = "on_train_end"
    EVAL_BEGIN = "on_eval_begin"
    EVAL_EPOCH_BEGIN = "on_eval_epoch_begin"
    EVAL_STEP_BEGIN = "on_eval_step_begin"
    EVAL_STEP_END = "on_eval_step_end"
    EVAL_EPOCH_END = "on_eval_epoch_end"
    EVAL_END = "on_eval_end"
    AFTER_BACKWARD = "on_after_backward"
    GRADIENTS_READY = "on_gradients_ready"
    BEFORE_OPTIMIZER_STEP = "on_before_optimizer_step"
    AFTER_OPTIMIZER_STEP = "on_after_optimizer_step"
    EXCEPTION = "on_exception"
    TEARDOWN = "on_teardown"

    def __str__(self) -> str:
        return self.value


LIFECYCLE = tuple(Event)[:12]
"""The twelve events of MindSpore."""

ALIASES: dict[str, tuple[Event, ...]] = {
    # Names used in tutorials, which MindSpore itself never calls: the training events.
    "on_step_begin": (Event.TRAIN_STEP_BEGIN,),
    "on_step_end": (Event.TRAIN_STEP_END,),
    "on_epoch_begin": (Event.TRAIN_EPOCH_BEGIN,),
    "on_epoch_end": (Event.TRAIN_EPOCH_END,),
    # MindSpore's older names, which it calls in training and in evaluation.
    "begin": (Event.TRAIN_BEGIN, Event.EVAL_BEGIN),
    "epoch_begin": (Event.TRAIN_EPOCH_BEGIN, Event.EVAL_EPOCH_BEGIN),
    "step_begin": (Event.TRAIN_STEP_BEGIN, Event.EVAL_STEP_BEGIN),
    "step_end": (Event.TRAIN_STEP_END, Event.EVAL_STEP_END),
    "epoch_end": (Event.TRAIN_EPOCH_END, Event.EVAL_EPOCH_END),
    "end": (Event.TRAIN_END, Event.EVAL_END),
}
"""Alias -> events; if a callback has both, the event's own name takes precedence."""
