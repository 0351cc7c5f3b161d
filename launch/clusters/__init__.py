"""Templates for cloud clusters: `ray up` on AWS and GCP, KubeRay on Kubernetes. See docs/cluster.md."""
