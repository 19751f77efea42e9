"""The command `kvferry`: `main.py` has its commands and options, a folder each what they do."""
