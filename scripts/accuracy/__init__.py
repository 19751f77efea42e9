"""The accuracy test: the same tokens through two engines and kvferry as from one engine, and proof that they moved.

`settings` says what is wanted, `devices` what is free, `model` makes the default model, `processes`, `engines` and
`fleet` run servers, `prompts` and `client` ask, `metrics` counts, `phases` and `run` put these together, `checks`,
`scores` and `judging` judge, `report` shows. `python -m scripts.accuracy --help` lists the variables.
"""
