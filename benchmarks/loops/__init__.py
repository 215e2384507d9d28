"""The training loops that overhead.py measures: one module per framework, which is imported in a process
of its own."""

import sys
from pathlib import Path

# The ViT of the largest workload is an example's.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "digits_vit"))

ENGINES = {
    "torch": ("bare", "dualtrain", "ignite", "skorch", "lightning", "trainer", "keras"),
    "graph": ("bare", "model", "dualtrain"),
    "pynative": ("bare", "model", "dualtrain"),
    "pynative-async": ("bare", "model", "dualtrain"),
}
"""Engine -> its loops. The first one is the hand-written loop that the others are compared with."""

TITLES = {
    "bare": "hand-written loop",
    "ignite": "Ignite",
    "skorch": "skorch",
    "lightning": "Lightning",
    "trainer": "HF Trainer",
    "keras": "Keras",
    "model": "mindspore Model",
}
