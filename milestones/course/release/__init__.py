"""Makes a student's tree: solutions cut, tests chosen, dead references removed."""
