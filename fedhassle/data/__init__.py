"""Data sets, how clients share them, and the views of an image that training sees."""
