"""Run schedules over links between hosts or processes."""
