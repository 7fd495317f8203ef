"""The whole step as native code, built where it runs."""
