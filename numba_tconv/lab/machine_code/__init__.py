"""What the compilers made of a kernel."""
