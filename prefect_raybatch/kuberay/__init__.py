"""Creates, finds, keeps alive and deletes the Ray cluster of one run on Kubernetes."""
