"""`python -m deepspeed_gear`: the `gear` command."""

import sys

from deepspeed_gear.cli.main import main

sys.exit(main())
