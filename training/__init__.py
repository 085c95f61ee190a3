"""Fine-tuning and distillation of converted models; the command line is `training/finetune.py`."""
