"""What serves: ``serving.json``, and how replicas are brought to it.

Roll-out, roll-back, reconcile.
"""
