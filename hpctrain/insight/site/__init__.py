"""The site file of a cluster: written from what its commands say, and checked by them."""
