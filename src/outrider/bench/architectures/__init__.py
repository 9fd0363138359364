"""Every architecture of the installed transformers, tiny: does Outrider give the text of transformers' own generate?"""
