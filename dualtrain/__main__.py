"""``python -m dualtrain``."""

import sys

from dualtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
