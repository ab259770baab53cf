"""Work pools that train: base job templates for Kubernetes and Slurm, and what a job on them runs."""
