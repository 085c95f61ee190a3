"""The objectives, their weighted sum, the teacher, and attention transfer."""
