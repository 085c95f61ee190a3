"""Code that conversion and training share; checkpoints do not contain it."""
