"""What is minimised. Pure functions of arrays; every loss is a sum, with the total to divide by, so no split can change it."""
