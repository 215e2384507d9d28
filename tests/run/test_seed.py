"""seed_everything: one seed for Python, numpy and every framework that is in use."""

import random
import subprocess
import sys

import numpy as np
import pytest

import dualtrain as dt
from dualtrain.errors import ArgumentTypeError, ArgumentValueError


def drawn(engine):
    """Return a number of each source of random numbers."""
    if engine.framework == "torch":
        import torch

        framework = torch.rand(1).item()
    else:
        import mindspore

        framework = float(mindspore.ops.rand(1).asnumpy()[0])
    return random.random(), float(np.random.rand()), framework


def test_the_same_seed_gives_the_same_numbers_and_another_one_others(engine):
    assert dt.seed_everything(7) == 7
    first = drawn(engine)
    assert drawn(engine) != first
    dt.seed_everything(7)
    assert drawn(engine) == first
    dt.seed_everything(8)
    assert all(other != one for other, one in zip(drawn(engine), first, strict=True))


@pytest.mark.parametrize("seed", ["7", 7.0, True, None])
def test_a_seed_is_an_integer(seed):
    with pytest.raises(ArgumentTypeError, match="takes an integer"):
        dt.seed_everything(seed)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_fits_into_32_bits(seed):
    with pytest.raises(ArgumentValueError, match=f"from 0 to {2**32 - 1}, but got {seed}"):
        dt.seed_everything(seed)


def test_no_framework_is_imported_for_it():
    program = (
        "import random, sys, dualtrain\n"
        "dualtrain.seed_everything(3)\n"
        "assert random.random() == random.Random(3).random()\n"
        "assert not {'torch', 'mindspore'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
