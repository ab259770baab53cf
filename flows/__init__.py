"""The order of things, and the human gates. One screen each. Imported by nobody but tests and Prefect."""
