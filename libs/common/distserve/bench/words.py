"""Common English words, of which most are one token to most tokenizers."""

_TEXT = """
the of and to in is was for that it with as his on be at by this had not are but from or have an they which one you
were her all she there would their we him been has when who will more no if out so said what up its about into than
them can only other new some could time these two may then do first any my now such like our over man me even most
made after also did many before must through back years where much your way well down should because each just those
people how too little state good very make world still own see men work long get here between both life being under
never day same another know while last might us great old year off come since against go came right used take three
small number part place again house around few water found home room without think need thing night head open always
ask better face fact form give group hand help high line light name large left live side mind move point run set
story study system turn until war week white whole word young air already among best body book call car change
church city close course cut door early end eyes family far feel field free friend full girl god half hard heart
hold idea keep kind land late law learn less letter level love main mean money moral morning mother music necessary
next nothing office often order paper past period person plan play power present president price problem public
question rather reason rest result river road school second seem sense service several show social sound stand start
street strong sure table tell term third though thought today together took toward town tree true trying value view
voice walk want west wife woman women write yet
"""
CANDIDATES = tuple(_TEXT.split())
