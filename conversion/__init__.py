"""Converting a pretrained softmax checkpoint; the command line is `conversion/convert_checkpoint.py`."""
