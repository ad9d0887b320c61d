"""What several measurements share: systems under test, services, workloads, rounds in turns."""
