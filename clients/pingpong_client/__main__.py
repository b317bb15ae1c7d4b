"""``python -m pingpong_client`` is ``pingpong-client``."""

import sys

from pingpong_client.cli import main

sys.exit(main())
