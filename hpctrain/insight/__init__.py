"""What looks at runs and machines: plan, report, doctor, bench."""
