"""TIDE keeps the draft model of a speculative-decoding service adapted to its live traffic.

The nouns (domain), the rules (drift, acceptance, promotion, lineage) and the doors (store, engine, trainer, evaluator).
"""
