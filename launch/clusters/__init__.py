"""Clusters of rented machines: for `ray up` on AWS and GCP, for KubeRay on Kubernetes; see docs/cluster.md.

The files beside this one are to be copied and filled in.
"""
