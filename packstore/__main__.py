"""``python -m packstore``."""

import sys

from packstore.cli import main

sys.exit(main())
