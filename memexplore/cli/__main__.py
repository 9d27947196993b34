"""``python -m memexplore.cli``, the same as the command ``memexplore``."""

import sys

from memexplore.cli.commands import main

sys.exit(main())
