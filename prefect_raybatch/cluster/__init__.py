"""Ray: connects to a cluster, keeps engines warm, and sends shards through the stages of a run."""
