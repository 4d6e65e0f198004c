"""The training program: `python train.py --help`."""
