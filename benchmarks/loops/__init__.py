"""The training loops of overhead.py: one module per framework, imported in a separate process."""

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
