"""What runs beside a student's code, inside the sandbox: no checks, no expected values, no reference."""
