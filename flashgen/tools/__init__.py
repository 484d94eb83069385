"""What looks at kernels and calls: commands, profiles, tuning, pictures, reports, the doctor."""
