"""TIDE keeps the draft model of a speculative-decoding service adapted to its live traffic.

The nouns (domain), a folder for each concept (drift, promotion ...) and the doors (store, engine, trainer, evaluator).
"""
