"""`kvferry plan` and `kvferry describe`: a pair of engines as tables, JSON and a picture."""
