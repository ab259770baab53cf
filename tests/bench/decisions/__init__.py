"""Error rates of the gates, measured through the real rules on per-request data of real SGLang runs."""
