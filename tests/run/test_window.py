"""The accumulation window and its look-ahead: which batch is fetched when, and which one ends a window."""

import pytest

from dualtrain.errors import RunStateError
from dualtrain.window import LookAhead, Window, end_pass


class Source:
    """Numbers from 1, with a count of those that were fetched; ``closed`` counts closings."""

    def __init__(self, count):
        self.count = count
        self.fetched = self.closed = 0

    def __iter__(self):
        return SourceIterator(self)


class SourceIterator:
    def __init__(self, source):
        self._source, self._given = source, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self._given == self._source.count:
            raise StopIteration
        self._given += 1
        self._source.fetched += 1
        return self._given

    def close(self):
        self._source.closed += 1


def passed(ahead, source, *args, **options):
    """Return (batch, is_last, fetched before is_last was read, fetched after) for a whole pass."""
    ahead.begin(source, *args, **options)
    seen = []
    for batch in ahead:
        before = source.fetched
        seen.append((batch, ahead.is_last, before, source.fetched))
    return seen


# Which batch is the last, and what is fetched for the answer.


def test_without_a_length_the_answer_fetches_the_next_batch_and_no_other():
    source = Source(3)
    assert passed(LookAhead(), source) == [(1, False, 1, 2), (2, False, 2, 3), (3, True, 3, 3)]


def test_without_the_question_nothing_is_fetched_early():
    source, ahead = Source(3), LookAhead()
    ahead.begin(source)
    assert [(batch, source.fetched) for batch in ahead] == [(1, 1), (2, 2), (3, 3)]


def test_a_second_question_fetches_nothing():
    source, ahead = Source(3), LookAhead()
    ahead.begin(source)
    next(ahead)
    assert [ahead.is_last, ahead.is_last, source.fetched] == [False, False, 2]


def test_a_true_length_answers_without_a_fetch():
    source = Source(3)
    assert passed(LookAhead(), source, 3) == [(1, False, 1, 1), (2, False, 2, 2), (3, True, 3, 3)]


def test_a_length_that_is_too_small_is_looked_beyond_from_there_on():
    source = Source(4)
    assert passed(LookAhead(), source, 2) == [
        (1, False, 1, 1),
        (2, False, 2, 3),
        (3, False, 3, 4),
        (4, True, 4, 4),
    ]


def test_a_length_that_is_too_large_is_believed():
    source = Source(2)
    assert passed(LookAhead(), source, 5) == [(1, False, 1, 1), (2, False, 2, 2)]


@pytest.mark.parametrize("length", [None, 5, 2])
def test_a_limit_ends_a_pass_and_fetches_nothing_beyond_it(length):
    source = Source(5)
    seen = passed(LookAhead(), source, length, limit=2)
    assert [(batch, is_last) for batch, is_last, *_ in seen] == [(1, False), (2, True)]
    assert source.fetched == 2


def test_a_limit_beyond_the_end_changes_nothing():
    source = Source(2)
    assert [entry[:2] for entry in passed(LookAhead(), source, limit=7)] == [(1, False), (2, True)]


def test_no_batches_are_no_pass():
    ahead = LookAhead()
    assert passed(ahead, Source(0)) == []
    assert list(ahead) == []


def test_every_pass_over_data_that_can_be_repeated_begins_anew():
    source, ahead = Source(3), LookAhead()
    for _ in range(2):
        assert [entry[:2] for entry in passed(ahead, source)] == [(1, False), (2, False), (3, True)]


# A loader that fills one buffer again and again.


class Reused:
    """Batches in one list, whose content the next fetch replaces."""

    def __init__(self, count):
        self.buffer, self._count = [0], count

    def __iter__(self):
        for number in range(1, self._count + 1):
            self.buffer[0] = number
            yield self.buffer


def test_a_buffer_that_is_reused_holds_its_batch_until_the_question():
    ahead, seen = LookAhead(), []
    ahead.begin(Reused(4))
    window = Window(ahead, 3)
    for batch in ahead:
        window.add()
        content = batch[0]  # as backward reads it
        if window.closes:
            window.filled = 0
        seen.append(content)
    assert seen == [1, 2, 3, 4]


def test_a_full_window_does_not_touch_the_buffer():
    ahead = LookAhead()
    ahead.begin(Reused(4))
    window = Window(ahead, 1)
    batch = next(ahead)
    window.add()
    assert window.closes
    assert batch == [1]


# A fetched batch that a stop leaves over.


def test_an_iterator_goes_on_with_the_batch_that_was_fetched_before_a_stop():
    source, ahead = Source(4), LookAhead()
    iterator = iter(source)
    ahead.begin(iterator)
    assert [next(ahead), ahead.is_last] == [1, False]
    ahead.close()
    assert source.closed == 0
    ahead.begin(iterator)
    assert list(ahead) == [2, 3, 4]


def test_an_iterator_goes_on_after_a_limit():
    ahead, iterator = LookAhead(), iter(Source(5))
    passes = []
    for _ in range(3):
        ahead.begin(iterator, limit=2)
        passes.append(list(ahead))
        ahead.close()
    assert passes == [[1, 2], [3, 4], [5]]


def test_another_iterator_does_not_get_the_batch_that_was_fetched():
    ahead = LookAhead()
    ahead.begin(iter(Source(4)))
    assert [next(ahead), ahead.is_last] == [1, False]
    ahead.begin(iter([7, 8]))
    assert list(ahead) == [7, 8]


def test_data_that_can_be_repeated_is_closed_and_its_fetched_batch_forgotten():
    source, ahead = Source(4), LookAhead()
    ahead.begin(source)
    assert [next(ahead), ahead.is_last] == [1, False]
    ahead.close()
    assert source.closed == 1
    ahead.close()
    assert source.closed == 1
    ahead.begin(source)
    assert list(ahead) == [1, 2, 3, 4]


def test_the_end_of_a_pass_closes_no_iterator_of_the_callers():
    source = Source(1)
    iterator = iter(source)
    end_pass(iterator, iterator)
    assert source.closed == 0
    end_pass(iterator, source)
    assert source.closed == 1
    end_pass(iter([1]), [1])  # has no close()


# The window.


def windows(count, accumulate_steps, length=None):
    """Return whether each batch ends its window, and what was fetched by then."""
    source, ahead = Source(count), LookAhead()
    ahead.begin(source, length)
    window, seen = Window(ahead, accumulate_steps), []
    for _ in ahead:
        window.add()
        closes = window.closes
        seen.append((closes, source.fetched))
        if closes:
            window.filled = 0
    return seen


def test_a_window_ends_when_it_is_full_or_with_the_pass():
    assert [closes for closes, _ in windows(5, 3)] == [False, False, True, False, True]
    assert [closes for closes, _ in windows(6, 3)] == [False, False, True, False, False, True]
    assert [closes for closes, _ in windows(2, 3)] == [False, True]


def test_a_window_asks_for_the_next_batch_only_where_it_has_room():
    assert [fetched for _, fetched in windows(5, 3)] == [2, 3, 3, 5, 5]
    assert [fetched for _, fetched in windows(3, 1)] == [1, 2, 3]
    assert [fetched for _, fetched in windows(5, 3, length=5)] == [1, 2, 3, 4, 5]


def test_the_size_is_that_with_which_a_window_was_opened():
    window = Window(LookAhead(), 3)
    assert (window.accumulate_steps, window.size, window.filled) == (3, 3, 0)
    window.accumulate_steps = 2
    assert (window.accumulate_steps, window.size) == (2, 3)
    window.add()
    assert (window.size, window.filled) == (2, 1)


def test_the_size_cannot_change_inside_a_window():
    window = Window(LookAhead(), 3)
    window.add()
    with pytest.raises(RunStateError, match="1 of 3 batches are done: set it in on_train_epoch_begin"):
        window.accumulate_steps = 2
    assert window.accumulate_steps == 3


def test_an_open_window_is_dropped_with_a_warning(caplog):
    window = Window(LookAhead(), 3)
    window.drop()
    assert caplog.text == ""
    window.add()
    window.add()
    window.drop()
    assert "the gradients of its 2 batches, of 3, are dropped" in caplog.text
    assert window.filled == 0
    window.drop()
    assert len(caplog.records) == 1
