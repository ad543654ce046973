"""`python -m ntpjax`: see `ntpjax.cli`."""

import sys

from ntpjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
