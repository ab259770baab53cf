"""The verbs: one file a stage. Each loads, makes one rule decide or one port act, and records. No thresholds here."""
