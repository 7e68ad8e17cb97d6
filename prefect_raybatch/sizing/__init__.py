"""Job, cluster and model to every size of a run, with its reason."""
