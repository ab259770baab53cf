"""How the parts that TIDE stands on are built and started on one machine."""
