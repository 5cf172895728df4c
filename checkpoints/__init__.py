"""The shipped models, as data of the installed package. model.checkpoint.shipped() finds them."""
