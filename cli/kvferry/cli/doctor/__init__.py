"""`kvferry doctor`: checks of this machine, with a remedy for each problem.

A check is a function from the `Machine` to findings; `command.py` has the list. Files are looked up below the machine's
root, so that tests can invent machines. A check whose package is missing is reported as not done.
"""
