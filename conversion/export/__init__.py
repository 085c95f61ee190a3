"""`export`: a converted model in a form that other programs load without this package."""
