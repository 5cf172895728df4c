"""What measures and checks: one module for each of the lab's commands."""
