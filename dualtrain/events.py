"""The lifecycle events, the other names people write for them, and when each one fires.

Training with ``fit`` (``train`` is the same without the evaluation)::

    on_train_begin
      on_train_epoch_begin
        on_train_step_begin
           [forward, backward]
           on_after_backward                                 gradients of this batch, raw
           on_gradients_ready                                once per update: unscaled, not yet clipped
           on_before_optimizer_step                          once per update: clipped
           [update]
           on_after_optimizer_step                           once per update: skipped or not is known
        on_train_step_end                                    once per batch
        (evaluation, when it is due for this epoch)
        on_eval_begin
          on_eval_epoch_begin
            on_eval_step_begin
               [forward]
            on_eval_step_end                                 once per batch
          on_eval_epoch_end
        on_eval_end                                          metrics are known
      on_train_epoch_end                                     metrics still readable
    on_train_end

The four events around the gradients are there on PyTorch and in MindSpore's PYNATIVE mode; in
GRAPH mode no Python runs inside a step, and a callback that has one of them is refused.

``eval`` alone fires the six ``on_eval_*`` events. What each way of ending leaves out:

=================================  ==================================================
the run ends by                    events that follow
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
    """A point in a run that callbacks can listen to; its value is the method's name.

    The first twelve are MindSpore's, in MindSpore's order. The others are dualtrain's own.
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
    CHECKPOINT_SAVE = "on_checkpoint_save"
    CHECKPOINT_LOAD = "on_checkpoint_load"
    EXCEPTION = "on_exception"
    TEARDOWN = "on_teardown"

    def __str__(self) -> str:
        return self.value


LIFECYCLE = tuple(Event)[:12]
"""The twelve events that MindSpore itself has."""

ALIASES: dict[str, tuple[Event, ...]] = {
    # Tutorials write these; MindSpore never calls them. They mean the training event.
    "on_step_begin": (Event.TRAIN_STEP_BEGIN,),
    "on_step_end": (Event.TRAIN_STEP_END,),
    "on_epoch_begin": (Event.TRAIN_EPOCH_BEGIN,),
    "on_epoch_end": (Event.TRAIN_EPOCH_END,),
    "on_save": (Event.CHECKPOINT_SAVE,),
    # MindSpore's older names, which it calls in training and in evaluation.
    "begin": (Event.TRAIN_BEGIN, Event.EVAL_BEGIN),
    "epoch_begin": (Event.TRAIN_EPOCH_BEGIN, Event.EVAL_EPOCH_BEGIN),
    "step_begin": (Event.TRAIN_STEP_BEGIN, Event.EVAL_STEP_BEGIN),
    "step_end": (Event.TRAIN_STEP_END, Event.EVAL_STEP_END),
    "epoch_end": (Event.TRAIN_EPOCH_END, Event.EVAL_EPOCH_END),
    "end": (Event.TRAIN_END, Event.EVAL_END),
}
"""Other names for events; where a callback has both, the event's own name wins."""
