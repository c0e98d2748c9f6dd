"""The measurements of the paper "Distributed GPT-2" (Sahdev, Mathews, Guerrero): Tables 1 and 2, and its samples."""

from gpt2core.app.output.loss_plot import Curve

# {name of a program of the paper: line style of its curve}. These programs are the columns of TABLE; a row is a step.
LINE_STYLES = {"serial": "-", "MPI": "--", "CUDA": "-.", "MPI and CUDA": ":"}
TABLE = """
5.168034 5.201166 5.168034 5.168032
4.835179 4.909738 4.828819 4.848721
4.635695 4.657234 4.693434 4.733808
4.498031 4.513676 4.599409 4.667499
4.307395 4.372570 4.438262 4.585856
4.116387 4.194777 4.275943 4.485087
3.955092 4.019602 4.188701 4.339321
3.768782 3.812284 3.979571 4.226109
3.616539 3.634256 3.850794 4.053402
3.425641 3.444267 3.666654 3.947483
3.287244 3.286560 3.600918 3.812050
3.151229 3.135570 3.401670 3.674679
2.972546 2.969585 3.263098 3.556235
2.845131 2.834611 3.147053 3.392360
2.692842 2.713197 2.984125 3.283488
2.594075 2.580026 2.916426 3.142538
2.459776 2.452893 2.756461 3.035375
2.358055 2.337913 2.672071 2.904566
2.234961 2.247525 2.546729 2.775875
2.140623 2.161558 2.437326 2.684566
2.057503 2.067901 2.355522 2.561371
1.959350 1.986983 2.225365 2.449701
1.889150 1.920686 2.179677 2.361585
1.808680 1.843655 2.055092 2.276168
1.731022 1.770636 1.972043 2.182588
1.663653 1.725614 1.899132 2.127309
1.595727 1.664273 1.809431 2.021111
1.549898 1.628996 1.765366 1.962746
1.486133 1.559248 1.681660 1.887382
1.449035 1.525455 1.637654 1.821456
1.384689 1.470772 1.566861 1.745462
1.346302 1.439264 1.516590 1.690155
1.317822 1.399520 1.480041 1.615830
1.268267 1.375479 1.410141 1.587385
1.242517 1.321622 1.389990 1.521429
1.204523 1.319988 1.332015 1.492083
1.169466 1.286617 1.294037 1.458650
1.147755 1.266407 1.262068 1.408189
1.106339 1.233488 1.213218 1.376131
1.098106 1.219159 1.195222 1.336293
1.058793 1.210178 1.151835 1.320888
1.052256 1.181083 1.139206 1.269017
1.019223 1.168295 1.100039 1.257959
0.994312 1.149404 1.074328 1.214961
0.997309 1.140108 1.060757 1.194417
0.956744 1.127041 1.018466 1.176377
0.957396 1.089700 1.014140 1.134088
0.929843 1.090754 0.975913 1.130392
0.910516 1.075718 0.951944 1.092683
0.908195 1.072370 0.937564 1.081243
"""
COLUMNS = zip(*(line.split() for line in TABLE.strip().split("\n")), strict=True)
LOSSES = {  # {program: 50 losses, in nats per token}
    program: [float(loss) for loss in column] for program, column in zip(LINE_STYLES, COLUMNS, strict=True)
}


def paper_curves():
    """[Curve] of the paper's four programs, in grey."""
    return [
        Curve(f"paper, {program}", list(range(50)), LOSSES[program], {"color": "0.5", "linestyle": style})
        for program, style in LINE_STYLES.items()
    ]


# Table 1, in seconds, {program: (training, inference)}. "MPI" is the program on two CPUs with `mpirun -n 8`.
SECONDS = {
    "serial": (15264.36, 112.62),
    "MPI": (1287.76, 112.28),
    "CUDA": (429.44, 8.01),
    "MPI and CUDA": (226.39, 7.80),
}
MPI_SECONDS_IN_TEXT = 12878.0  # sections 9.1 and 9.3; Table 1 has 1287.76
PROCESSES = {"slides": 4, "command": 8}  # MPI processes according to the slides and to the command in section 8
CPU = "Intel Core i7-7820HQ, 4 cores (two machines for MPI)"
GPU = "NVIDIA Quadro M1200 (two machines for MPI and CUDA)"
SAMPLES = {  # Figures 6 to 9: the 30 new tokens after the same 256 tokens
    "serial": "Tinkering with an absurdly long paragraph that there are many tokens so the closer this feels to. The "
    "dummy data scientists, and seas made of entropy, and",
    "MPI": "Tinkering with their minimal GPT implementations. The dummy data, and seas made of entropy, and seas made "
    "of entropy, and seas made of entropy, and",
    "CUDA": "tinkering with an absurdly long paragraph that there are many tokens so the closer this feels to a corpus "
    "even if it is just generated prose. The dummy data",
    "MPI and CUDA": "tinkering with an absurdly long paragraph that there are many tokens so the network will see "
    "enough variety to a corpus even if it is that there are many tokens",
}
