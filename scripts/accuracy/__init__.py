"""The accuracy test: the same tokens through two engines and kvferry as from one engine, and proof that they moved.

`variables` and `settings` say what is wanted, `gpus` and `ports` what is free, `model` makes the default model,
`processes`, `engines` and `router` run servers, `prompts` and `client` ask, `metrics` and `iterations` count,
`arithmetic` and `gsm8k` score, `phases` put these together, `checks` judge, `report` shows.
`python -m scripts.accuracy --help` lists the variables.
"""
