"""A simulated AWS account for every session: the backend, its command line, and the environment made of both."""
